"""Contents of groups on disk: what rollouts append is written by its worker and read by the driver."""
