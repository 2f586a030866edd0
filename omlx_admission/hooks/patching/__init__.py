"""How anything of oMLX is patched: what it must look like, the check, the ledger of changes."""
