"""The configuration: a schema without torch, loading with origins, rules between keys, explanations."""
