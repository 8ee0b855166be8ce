"""Generated messages and services of version 1 of the contract."""
