-- Notes that no unit came back to the sales $1 while their buyers were read.
UPDATE audit_sales SET still = true WHERE sale_id = ANY ($1)
