package order

import (
	"cmp"
	"errors"
	"iter"
	"strconv"
	"strings"
)

// MaxItems is the most items of a sale: each has a letter.
const MaxItems = len(itemLetters)

// itemLetters are the letters of the items of a sale, in their order.
const itemLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

// ItemLetter is the letter of an item of a sale, by its place from 0.
func ItemLetter(item int) string { return itemLetters[item : item+1] }

// Lines are what an order of a sale with items holds: the letter and the units of each of its items, in the order of
// the sale, as in "a2c1". They are empty in other sales. Equal lines are equal texts.
type Lines string

var errNoLines = errors.New("lines are letters in their order, each with its units, as in a2c1")

// ParseLines reads the only form that lines have.
func ParseLines(text string) (Lines, error) {
	last, sum := -1, int64(0)
	for rest := text; rest != ""; {
		item := strings.IndexByte(itemLetters, rest[0])
		digits := 1
		for digits < len(rest) && '0' <= rest[digits] && rest[digits] <= '9' {
			digits++
		}
		units, err := strconv.ParseInt(rest[1:digits], 10, 64)
		if item <= last || err != nil || rest[1] == '0' || units > MaxPerOrder {
			return "", errNoLines
		}
		last, sum, rest = item, sum+units, rest[digits:]
	}
	if last < 0 || sum > MaxPerOrder {
		return "", errNoLines
	}
	return Lines(text), nil
}

// MakeLines returns the lines of an order with so many units of each item, by its place from 0.
func MakeLines(units []int64) Lines {
	var text []byte
	for item, n := range units {
		if n > 0 {
			text = strconv.AppendInt(append(text, itemLetters[item]), n, 10)
		}
	}
	return Lines(text)
}

// linesMax is no less than the length of the longest lines: 52 letters with five or six digits each, because the sum of
// all is at most MaxPerOrder.
const linesMax = 320

// Each returns the places of the items, from 0, with their units. The lines must be valid.
func (l Lines) Each() iter.Seq2[int, int64] {
	return func(yield func(int, int64) bool) {
		for rest := string(l); rest != ""; {
			item, units := strings.IndexByte(itemLetters, rest[0]), int64(0)
			for rest = rest[1:]; rest != "" && rest[0] <= '9'; rest = rest[1:] {
				units = units*10 + int64(rest[0]-'0')
			}
			if !yield(item, units) {
				return
			}
		}
	}
}

// Units is the sum of the units.
func (l Lines) Units() (sum int64) {
	for _, units := range l.Each() {
		sum += units
	}
	return sum
}

// Items are the units of an order by the code of the item, as an object in JSON: {"m":2}. They are empty in sales
// without items.
type Items string

// MarshalJSON implements json.Marshaler.
func (i Items) MarshalJSON() ([]byte, error) { return []byte(cmp.Or(i, "null")), nil }

// UnmarshalJSON implements json.Unmarshaler.
func (i *Items) UnmarshalJSON(text []byte) error {
	*i = Items(text)
	return nil
}

// Named returns the lines with the codes of the sale's items, which need no escaping. An item without one has its
// letter.
func (l Lines) Named(codes []string) Items {
	if l == "" {
		return ""
	}
	text := []byte{'{'}
	for item, units := range l.Each() {
		code := ItemLetter(item)
		if item < len(codes) {
			code = codes[item]
		}
		if len(text) > 1 {
			text = append(text, ',')
		}
		text = append(append(append(text, '"'), code...), '"', ':')
		text = strconv.AppendInt(text, units, 10)
	}
	return Items(append(text, '}'))
}

// maxCodeBytes bounds the code of an item.
const maxCodeBytes = 32

// IsItemCode reports whether the text can be the code of an item.
func IsItemCode(text string) bool {
	return text != "" && len(text) <= maxCodeBytes && strings.Trim(text, "abcdefghijklmnopqrstuvwxyz0123456789._-") == ""
}
