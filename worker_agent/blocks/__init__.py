"""Layouts, tiers and transfers of blocks. Knows bytes, not training."""
