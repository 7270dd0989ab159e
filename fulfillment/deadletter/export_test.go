package deadletter

const FieldReplayOf = fieldReplayOf

var (
	EncodeFields = encodeFields
	DecodeFields = decodeFields
	ReservedOf   = reservedOf
)
