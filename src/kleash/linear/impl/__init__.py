"""The ways to compute what kleash.linear promises."""
