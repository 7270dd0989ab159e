-- Which of the sales $1 are archived.
SELECT id FROM sales WHERE id = ANY ($1::uuid[]) AND archived_at IS NOT NULL
