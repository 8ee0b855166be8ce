"""The object tier: stores, the form of an object, claims to keys."""
