// Package ext has the two types that Traefik takes from a module which no proxy serves.
package ext

// HTTP extends an HTTP configuration; it is empty.
type HTTP struct{}

// Router extends a router; it is empty.
type Router struct{}
