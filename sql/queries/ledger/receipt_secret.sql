-- The secret with which ingresses sign receipts.
SELECT secret FROM receipt_key
