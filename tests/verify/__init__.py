"""A package, so that its files may import each other and share names with other folders' files."""
