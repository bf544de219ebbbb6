"""Migrations of the ledger, one per schema change, run by `unlearnd migrate`."""
