"""Jobs on Kubernetes: `graphft kubernetes` writes a job's manifests; docs/kubernetes.md tells how to live with them."""
