"""Every «may» and every «must not» of the table of permissions, on real servers."""
