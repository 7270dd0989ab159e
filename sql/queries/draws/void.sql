-- Makes the draw of the sale $1 void, with the reason $2.
UPDATE draws SET voided_at = now(), void_reason = $2 WHERE sale_id = $1
