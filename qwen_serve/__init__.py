"""The packages of the top-level folders, under one installed name: this folder links to them."""
