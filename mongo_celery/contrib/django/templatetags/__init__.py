"""Django searches for filters here."""
