"""A run as a page: one HTML file that opens anywhere, without a network. Imported only where one is made."""
