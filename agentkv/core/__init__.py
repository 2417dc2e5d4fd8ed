"""Bookkeeping in plain Python: ids, counts and tokens. No tensor, no wire, no clock."""
