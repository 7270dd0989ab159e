-- The keys in Redis that lasting differences with the remedy $1 name.
SELECT DISTINCT same FROM reconcile_found WHERE remedy = $1
