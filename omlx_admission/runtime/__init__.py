"""The only places that wait, thin over :mod:`omlx_admission.policy`."""
