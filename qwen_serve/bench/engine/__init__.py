"""Measurements of the engine without a server: costs of single operations on this machine."""
