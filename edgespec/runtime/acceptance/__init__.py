"""Accept rules, one file each; their table is `edgespec.runtime.acceptance.verify.ACCEPT_RULES`."""
