"""Measurements of the engine without a server: costs of single operations of llama.cpp contexts on this
machine.
"""
