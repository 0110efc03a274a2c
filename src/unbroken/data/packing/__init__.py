"""How documents become sequences of one length: windows, groups, plans, rows."""
