"""What people do with dead messages: list, search, show, edit, discard and restore them."""
