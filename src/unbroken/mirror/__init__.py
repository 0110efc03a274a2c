"""Second stores: object stores through one client library, uploads that are verified, staging back."""
