package loadgen

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math"
	"sort"
	"strconv"
	"strings"
	"time"
)

// Arrivals is when the buyers of a crowd are due.
type Arrivals interface {
	// due is how long after the start a buyer is due, of so many. No buyer is due before the one in front.
	due(buyer, buyers int) time.Duration
}

// Evenly spreads the buyers over that time. The first one is due immediately.
type Evenly time.Duration

// due implements Arrivals.
func (over Evenly) due(buyer, buyers int) time.Duration {
	return time.Duration(float64(over) * float64(buyer) / float64(buyers))
}

// Flash brings half of the buyers in that time, half of the others in the same time again, and so on.
type Flash time.Duration

// due implements Arrivals.
func (half Flash) due(buyer, buyers int) time.Duration {
	return time.Duration(-float64(half) * math.Log2(1-float64(buyer)/float64(buyers)))
}

// Recorded are the buyers of each second, as an access log has them. A crowd of another size takes the same course.
type Recorded struct {
	seconds []int64 // without those in which nobody came; the first one is 0
	until   []int64 // how many had come at the end of each
}

// recordedMax bounds the lines of a recording: a day.
const recordedMax = 24 * 60 * 60

// ReadRecorded reads lines with a second and the number of buyers in it, such as "0 1200". Seconds may be those since
// 1970: the first one is the start. Empty lines, and those that begin with #, are ignored.
func ReadRecorded(r io.Reader) (Recorded, error) {
	var read Recorded
	lines := bufio.NewScanner(r)
	var first, total int64
	last := int64(-1)
	for n := 1; lines.Scan(); n++ {
		text := strings.TrimSpace(lines.Text())
		if text == "" || text[0] == '#' {
			continue
		}
		invalid := func(why string) (Recorded, error) {
			return Recorded{}, fmt.Errorf(`line %d, %q: %s; want a second and a number of buyers, as in "0 1200"`, n, text, why)
		}
		fields := strings.FieldsFunc(text, func(c rune) bool { return c == ' ' || c == '\t' || c == ',' })
		if len(fields) != 2 {
			return invalid(strconv.Itoa(len(fields)) + " values")
		}
		second, err := strconv.ParseInt(fields[0], 10, 64)
		if err != nil || second < 0 {
			return invalid("the second must be a whole number, at least 0")
		}
		count, err := strconv.ParseInt(fields[1], 10, 64)
		if err != nil || count < 0 || count > MaxBuyers {
			return invalid(fmt.Sprintf("the number must be 0 to %d", MaxBuyers))
		}
		switch {
		case last < 0:
			first = second
		case second <= last:
			return invalid("seconds must grow")
		case second-first >= recordedMax:
			return invalid("a recording may last a day")
		}
		last = second
		if total += count; count > 0 {
			read.seconds, read.until = append(read.seconds, second-first), append(read.until, total)
		}
	}
	if err := lines.Err(); err != nil {
		return Recorded{}, err
	}
	if total == 0 {
		return Recorded{}, errors.New("it has no buyers")
	}
	return read, nil
}

// due implements Arrivals.
func (r Recorded) due(buyer, buyers int) time.Duration {
	total := r.until[len(r.until)-1]
	nth := float64(buyer) * float64(total) / float64(buyers)
	i := sort.Search(len(r.until)-1, func(i int) bool { return float64(r.until[i]) > nth })
	before := int64(0)
	if i > 0 {
		before = r.until[i-1]
	}
	within := (nth - float64(before)) / float64(r.until[i]-before)
	return time.Duration(float64(time.Second) * (float64(r.seconds[i]) + within))
}

// over is the time in which all buyers are due.
func over(a Arrivals, buyers int) time.Duration {
	if even, ok := a.(Evenly); ok {
		return time.Duration(even) // the last one is due a moment before
	}
	return a.due(buyers-1, buyers)
}

// dueBy is how many of the buyers are due so long after the start.
func dueBy(a Arrivals, buyers int, elapsed time.Duration) int {
	return sort.Search(buyers, func(buyer int) bool { return a.due(buyer, buyers) > elapsed })
}
