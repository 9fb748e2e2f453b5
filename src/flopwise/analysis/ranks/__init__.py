"""Several ranks of one job: each file reduced to a small record, then matched, aligned and explained together."""
