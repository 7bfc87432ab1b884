"""C sources of the encoders; the built library lies here in the tree and in an installed package."""
