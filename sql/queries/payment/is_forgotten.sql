-- Whether the order $1 may be in an archive whose payments are not remembered (archive/remember_payments.sql).
SELECT EXISTS (SELECT FROM sales WHERE right(id::text, 4) = right($1::uuid::text, 4) AND archived_at IS NOT NULL AND NOT archive ? 'remembered_at')
