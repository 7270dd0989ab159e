package deadletter

var EncodeFields = encodeFields

var DecodeFields = decodeFields

const FieldReplayOf = fieldReplayOf

var ReservedOf = reservedOf
