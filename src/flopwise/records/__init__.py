"""Everything that is stored or sent between processes: tagged, versioned structs. No torch here."""
