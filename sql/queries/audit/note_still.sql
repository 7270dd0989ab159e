-- Notes that no unit returned to the sales $1 while their buyers were read.
UPDATE audit_sales SET still = true WHERE sale_id = ANY ($1)
