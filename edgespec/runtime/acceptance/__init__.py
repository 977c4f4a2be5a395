"""Accept rules, one file each; their table is `edgespec.runtime.verify.ACCEPT_RULES`."""
