"""Synthetic models for measuring."""
