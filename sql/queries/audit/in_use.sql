-- S3: what is open in a file, by what a sale must have before it is archived.
SELECT sale_id, NULL::uuid AS order_id, NULL AS user_id, reason AS what, 'operator' AS remedy
FROM audit_sales CROSS JOIN LATERAL sale_in_use(sale_id)
