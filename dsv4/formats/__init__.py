"""Number formats. `spec` holds the numbers (no torch); one file per format packs and unpacks."""
