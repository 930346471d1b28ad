//! A client of xenstore (public/io/xs_wire.h).
