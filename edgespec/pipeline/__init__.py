"""From a model's name or a recipe to an engine directory, what such directories hold, and the cache
of them. Imports both wings.
"""
