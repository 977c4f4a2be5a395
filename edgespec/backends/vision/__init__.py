"""Engines of image encoders, for every backend: what an export is to a build, how it is proven and
installed, and how a finished one is found. Knows no engine library."""
