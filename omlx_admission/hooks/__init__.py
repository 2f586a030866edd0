"""The only places that touch oMLX: one file per patched module, wrappers only."""
