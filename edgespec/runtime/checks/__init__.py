"""`edgespec verify`: what is found of an engine directory."""
