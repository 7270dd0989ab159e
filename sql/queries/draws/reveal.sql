-- Notes the parties $2 of the draw of the sale $1, with the secrets that they have revealed.
UPDATE draws SET parties = $2 WHERE sale_id = $1
