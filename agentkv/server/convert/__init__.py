"""The engine's values as messages: they copy numbers; what those mean stands in the contract."""
