"""What can be audited by name: functions at a dotted path, and the KL code of known packages."""
