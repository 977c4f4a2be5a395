"""Accept rules, each against its definition."""
