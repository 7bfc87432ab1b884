"""The tool's version, as manifests and plan digests name it; pyproject.toml says the same."""

VERSION = "0.1.0"
