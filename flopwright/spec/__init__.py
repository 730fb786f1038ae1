"""What is given: models, clusters, workloads, scenarios."""
