//! The handshake as a state machine without I/O: bytes in, replies out, and one decision at a time.
//!
//! Contract: [`Negotiator::step`] looks at the bytes that have arrived, consumes at most one message, appends the
//! answer, and says how to go on. Memory is bounded by [`MAX_OPTION_BYTES`], work by [`MAX_OPTIONS`], time by the
//! connection's watcher. The names of sections are those of the NBD protocol document.

use std::sync::Arc;

use spile_core::{Error, ErrorKind, coded_text};

use crate::contexts::{Context, MOST_CONTEXTS, Selected};
use crate::wire::handshake::{
    FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, InfoRequest, Invalid, KEPT_CONTEXT, LINK_CONTEXT, MetaRequest,
    OPTION_HEADER_BYTES, OptionHeader, info, option, put_export_name_reply, put_greeting, put_reply, rep, string,
    transmission,
};
use crate::wire::reply::cut;

/// The longest option data that is looked at, in bytes. Two names and several queries of the greatest length fit.
pub const MAX_OPTION_BYTES: u32 = 64 << 10;
/// The longest option data that is skipped and answered with an error; a longer one ends the session.
pub const MAX_SKIP_BYTES: u32 = 32 << 20;
/// What a client is told of an export that was not found is no longer.
const MOST_REASON_BYTES: usize = 512;
/// After so many options the session ends: no honest client sends that many.
pub const MAX_OPTIONS: u32 = 1024;

/// What the handshake tells of one export.
#[derive(Clone, Debug)]
pub struct Offer {
    /// Its name.
    pub name: String,
    /// A description for people; may be empty.
    pub description: String,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// The smallest request, in bytes.
    pub minimum_bytes: u32,
    /// The request size that suits the disk best, in bytes.
    pub preferred_bytes: u32,
    /// The largest request, in bytes.
    pub maximum_bytes: u32,
    /// The names of the disk's checkpoints.
    pub checkpoints: Vec<String>,
    /// By what its bytes are kept ([`KEPT_CONTEXT`]).
    pub kept: Option<String>,
    /// It is for this connection: another one of the same client would not get the same.
    pub is_alone: bool,
}

/// Whether the server offers or requires TLS ("Server-side requirements").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsMode {
    /// There is no TLS (NOTLS).
    Off,
    /// Clients may use TLS, but no export requires it (SELECTIVETLS).
    Optional,
    /// Clients have to use TLS (FORCEDTLS).
    Required,
}

/// What client and server have agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// Index of the export.
    pub export: usize,
    /// The size that the client was told, in bytes; the disk may have grown since.
    pub size_bytes: u64,
    /// Replies are structured.
    pub structured: bool,
    /// The metadata contexts that were selected for this export.
    pub contexts: Vec<Selected>,
    /// The client has named its link: it is Spile's, and writes.
    pub names_link: bool,
}

/// How to go on after a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Send what was answered and step again.
    Continue,
    /// Send what was answered, then start TLS. Bytes that arrived before that must not be used.
    StartTls,
    /// Send what was answered, then requests follow.
    Transmit(Session),
    /// Send what was answered, then hang up.
    HangUp,
}

/// One step: how many bytes of the input it used up, and how to go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The number of input bytes that were used.
    pub consumed: usize,
    /// How to go on.
    pub next: Next,
}

enum State {
    ClientFlags,
    Options,
    /// Data of an option that is too long to look at.
    Skipping {
        option: u32,
        left: u32,
    },
}

/// One client's handshake.
pub struct Negotiator {
    offers: Arc<[Offer]>,
    tls: TlsMode,
    tls_active: bool,
    state: State,
    fixed: bool,
    no_zeroes: bool,
    options: u32,
    structured: bool,
    /// The export for which contexts were selected last, and those.
    selected: Option<(usize, Vec<Selected>)>,
    names_link: bool,
    /// The export that was not found, with the kind of the reply and what the client is told.
    refused: Option<(String, u32, String)>,
}

impl Negotiator {
    /// A handshake about `offers`; appends the greeting to `out`.
    pub fn new(offers: Arc<[Offer]>, tls: TlsMode, out: &mut Vec<u8>) -> Self {
        put_greeting(out);
        Self {
            offers,
            tls,
            tls_active: false,
            state: State::ClientFlags,
            fixed: false,
            no_zeroes: false,
            options: 0,
            structured: false,
            selected: None,
            names_link: false,
            refused: None,
        }
    }

    /// The export that the next message chooses, when it is complete and there is no such export yet, and the contexts that it asks for. `None` as long as TLS has to come before it.
    pub fn asks_for(&self, input: &[u8]) -> Option<(String, Vec<String>)> {
        let State::Options = self.state else { return None };
        let (head, rest) = input.split_first_chunk::<OPTION_HEADER_BYTES>()?;
        let header = OptionHeader::parse(head)?;
        let data = rest.get(..header.len_bytes as usize)?;
        if !self.may_go_on(header) || header.len_bytes > MAX_OPTION_BYTES || self.needs_tls(header.option) {
            return None;
        }
        let (name, queries) = match header.option {
            option::EXPORT_NAME => (string(data).ok()?, Vec::new()),
            option::GO => (InfoRequest::parse(data).ok()?.name, Vec::new()),
            option::SET_META_CONTEXT => MetaRequest::parse(data).ok().map(|asked| (asked.export, asked.queries))?,
            _ => return None,
        };
        let queries = || queries.iter().map(|query| (*query).to_owned()).collect();
        (self.find(name).is_none() && !self.is_refused(name)).then(|| (name.to_owned(), queries()))
    }

    /// There is this one export now; none if it is `None`.
    pub fn offer(&mut self, offer: Option<Offer>) {
        self.offers = offer.into_iter().collect();
    }

    /// The export `name` cannot be had, because of `error`.
    pub fn refuse(&mut self, name: &str, error: &Error) {
        let kind = if error.kind() == ErrorKind::NotFound { rep::ERR_UNKNOWN } else { rep::ERR_POLICY };
        let why = coded_text(error.code(), cut(error.message(), MOST_REASON_BYTES));
        self.refused = Some((name.to_owned(), kind, why));
    }

    fn is_refused(&self, name: &str) -> bool {
        self.refused.as_ref().is_some_and(|(other, ..)| other == name)
    }

    fn refuse_unknown(&self, out: &mut Vec<u8>, option: u32, name: &str) {
        match &self.refused {
            Some((_, kind, why)) if self.is_refused(name) => refuse(out, option, *kind, why),
            _ => refuse_unknown(out, option, name),
        }
    }

    /// TLS has started: all that was agreed on before is void (`OPT_STARTTLS`), also which export was found. There are these now.
    pub fn tls_started(&mut self, offers: Arc<[Offer]>) {
        self.offers = offers;
        self.tls_active = true;
        self.structured = false;
        self.selected = None;
        self.names_link = false;
        self.refused = None;
    }

    /// Handles the next message in `input` and appends the answer to `out`. `None` when it is not complete yet.
    pub fn step(&mut self, input: &[u8], out: &mut Vec<u8>) -> Option<Step> {
        match self.state {
            State::ClientFlags => self.client_flags(input),
            State::Options => self.option(input, out),
            State::Skipping { option, left } => self.skip(option, left, input.len(), out),
        }
    }

    /// How many bytes the next step needs, as far as the first bytes of the input (`prefix`) tell.
    pub fn bytes_needed(&self, prefix: &[u8]) -> usize {
        match self.state {
            State::ClientFlags => 4,
            State::Skipping { .. } => 1,
            State::Options => match prefix.first_chunk().and_then(OptionHeader::parse) {
                Some(header) if header.len_bytes <= MAX_OPTION_BYTES => OPTION_HEADER_BYTES + header.len_bytes as usize,
                _ => OPTION_HEADER_BYTES,
            },
        }
    }

    fn client_flags(&mut self, input: &[u8]) -> Option<Step> {
        let flags = u32::from_be_bytes(*input.first_chunk()?);
        self.fixed = flags & u32::from(FLAG_FIXED_NEWSTYLE) != 0;
        self.no_zeroes = flags & u32::from(FLAG_NO_ZEROES) != 0;
        self.state = State::Options;
        let unknown = flags & !u32::from(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES);
        let next = if unknown == 0 { Next::Continue } else { Next::HangUp };
        Some(Step { consumed: 4, next })
    }

    fn option(&mut self, input: &[u8], out: &mut Vec<u8>) -> Option<Step> {
        let (head, rest) = input.split_first_chunk::<OPTION_HEADER_BYTES>()?;
        let Some(header) = OptionHeader::parse(head) else { return hang_up(input.len()) };
        if !self.may_go_on(header) {
            return hang_up(input.len());
        }
        if header.len_bytes > MAX_OPTION_BYTES {
            self.options += 1;
            self.state = State::Skipping { option: header.option, left: header.len_bytes };
            return Some(Step { consumed: OPTION_HEADER_BYTES, next: Next::Continue });
        }
        let data = rest.get(..header.len_bytes as usize)?;
        self.options += 1;
        let next = self.answer(header.option, data, out);
        Some(Step { consumed: OPTION_HEADER_BYTES + data.len(), next })
    }

    /// True for options that end the session before their data is read.
    fn may_go_on(&self, header: OptionHeader) -> bool {
        let export_name = header.option == option::EXPORT_NAME;
        self.options < MAX_OPTIONS
            && header.len_bytes <= MAX_SKIP_BYTES
            && (self.fixed || export_name)
            && !(export_name && header.len_bytes > MAX_OPTION_BYTES)
    }

    fn skip(&mut self, option: u32, left: u32, have: usize, out: &mut Vec<u8>) -> Option<Step> {
        let consumed = have.min(left as usize);
        if consumed == 0 {
            return None;
        }
        self.state = State::Skipping { option, left: left - consumed as u32 };
        if consumed == left as usize {
            self.state = State::Options;
            self.refuse_skipped(option, out);
        }
        Some(Step { consumed, next: Next::Continue })
    }

    fn refuse_skipped(&mut self, option: u32, out: &mut Vec<u8>) {
        if option == option::SET_META_CONTEXT {
            self.selected = None;
        }
        if self.needs_tls(option) {
            refuse(out, option, rep::ERR_TLS_REQD, "this server requires TLS");
        } else if is_known(option) {
            refuse(out, option, rep::ERR_TOO_BIG, "the option's data is too long");
        } else {
            refuse(out, option, rep::ERR_UNSUP, "unknown option");
        }
    }

    fn needs_tls(&self, option: u32) -> bool {
        self.tls == TlsMode::Required && !self.tls_active && !matches!(option, option::STARTTLS | option::ABORT)
    }

    fn answer(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Next {
        if self.needs_tls(option) {
            if option == option::EXPORT_NAME {
                return Next::HangUp;
            }
            refuse(out, option, rep::ERR_TLS_REQD, "this server requires TLS");
            return Next::Continue;
        }
        match option {
            option::EXPORT_NAME => return self.export_name(data, out),
            option::ABORT => {
                put_reply(out, option, rep::ACK, &[]);
                return Next::HangUp;
            }
            option::STARTTLS => return self.start_tls(data, out),
            option::GO => return self.go(data, out),
            option::INFO => {
                self.info(option, data, out);
            }
            option::LIST => self.list(data, out),
            option::STRUCTURED_REPLY => self.structured_reply(data, out),
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => self.meta(option, data, out),
            _ => refuse(out, option, rep::ERR_UNSUP, "unknown option"),
        }
        Next::Continue
    }

    /// Answers `OPT_EXPORT_NAME`, which has no error reply: a failure closes the connection.
    fn export_name(&self, data: &[u8], out: &mut Vec<u8>) -> Next {
        let Some(export) = string(data).ok().and_then(|name| self.find(name)) else {
            return Next::HangUp;
        };
        let offer = &self.offers[export];
        put_export_name_reply(out, offer.size_bytes, self.flags(offer), !self.no_zeroes);
        Next::Transmit(self.session(export))
    }

    fn start_tls(&self, data: &[u8], out: &mut Vec<u8>) -> Next {
        let option = option::STARTTLS;
        if !data.is_empty() {
            refuse(out, option, rep::ERR_INVALID, "the option takes no data");
        } else if self.tls_active {
            refuse(out, option, rep::ERR_INVALID, "TLS is active already");
        } else if self.tls == TlsMode::Off {
            refuse(out, option, rep::ERR_POLICY, "this server has no TLS");
        } else {
            put_reply(out, option, rep::ACK, &[]);
            return Next::StartTls;
        }
        Next::Continue
    }

    fn go(&self, data: &[u8], out: &mut Vec<u8>) -> Next {
        match self.info(option::GO, data, out) {
            Some(export) => Next::Transmit(self.session(export)),
            None => Next::Continue,
        }
    }

    /// Answers `OPT_INFO` or `OPT_GO`; the export when all is well.
    fn info(&self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Option<usize> {
        let request = match InfoRequest::parse(data) {
            Ok(request) => request,
            Err(Invalid(why)) => {
                refuse(out, option, rep::ERR_INVALID, why);
                return None;
            }
        };
        let Some(export) = self.find(request.name) else {
            self.refuse_unknown(out, option, request.name);
            return None;
        };
        put_infos(out, option, &self.offers[export], self.flags(&self.offers[export]), &request);
        put_reply(out, option, rep::ACK, &[]);
        Some(export)
    }

    fn list(&self, data: &[u8], out: &mut Vec<u8>) {
        if !data.is_empty() {
            return refuse(out, option::LIST, rep::ERR_INVALID, "the option takes no data");
        }
        for offer in self.offers.iter() {
            let len = (offer.name.len() as u32).to_be_bytes();
            let parts = [&len[..], offer.name.as_bytes(), offer.description.as_bytes()];
            put_reply(out, option::LIST, rep::SERVER, &parts);
        }
        put_reply(out, option::LIST, rep::ACK, &[]);
    }

    fn structured_reply(&mut self, data: &[u8], out: &mut Vec<u8>) {
        let option = option::STRUCTURED_REPLY;
        if !data.is_empty() {
            return refuse(out, option, rep::ERR_INVALID, "the option takes no data");
        }
        self.structured = true;
        put_reply(out, option, rep::ACK, &[]);
    }

    fn meta(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) {
        let set = option == option::SET_META_CONTEXT;
        if set {
            self.selected = None; // a failed attempt clears it as well
        }
        if set && !self.structured {
            let why = "structured replies must be negotiated first";
            return refuse(out, option, rep::ERR_INVALID, why);
        }
        let request = match MetaRequest::parse(data) {
            Ok(request) => request,
            Err(Invalid(why)) => return refuse(out, option, rep::ERR_INVALID, why),
        };
        let Some(export) = self.find(request.export) else {
            return self.refuse_unknown(out, option, request.export);
        };
        let all = Context::all(&self.offers[export].checkpoints).into_iter().zip(1..);
        let meant = all.filter(|(context, _)| context.is_meant(&request.queries, !set));
        let meant: Vec<_> = meant.map(|(context, id)| Selected { id, context }).collect();
        if set && meant.len() > MOST_CONTEXTS {
            let why = format!("a session has {MOST_CONTEXTS} metadata contexts at most");
            return refuse(out, option, rep::ERR_TOO_BIG, &why);
        }
        for Selected { id, context } in &meant {
            // The identity in a list is reserved and zero.
            let id = if set { *id } else { 0 };
            put_reply(out, option, rep::META_CONTEXT, &[&id.to_be_bytes()[..], context.name().as_bytes()]);
        }
        let asks_for_kept = request.queries.contains(&KEPT_CONTEXT);
        if let Some(kept) = self.offers[export].kept.as_ref().filter(|_| set && asks_for_kept) {
            // No number of a context that has block status.
            let name = format!("{KEPT_CONTEXT}={kept}");
            put_reply(out, option, rep::META_CONTEXT, &[&0_u32.to_be_bytes()[..], name.as_bytes()]);
        }
        if set {
            self.names_link = request.queries.iter().any(|query| query.starts_with(LINK_CONTEXT));
            self.selected = Some((export, meant));
        }
        put_reply(out, option, rep::ACK, &[]);
    }

    /// The export of this name. The empty name is the default: the export that is named so, else the only one.
    fn find(&self, name: &str) -> Option<usize> {
        let only = || (name.is_empty() && self.offers.len() == 1).then_some(0);
        self.offers.iter().position(|offer| offer.name == name).or_else(only)
    }

    fn session(&self, export: usize) -> Session {
        let selected = self.selected.as_ref().filter(|(of, _)| self.structured && *of == export);
        let contexts = selected.map(|(_, contexts)| contexts.clone()).unwrap_or_default();
        let (size_bytes, names_link) = (self.offers[export].size_bytes, self.names_link);
        Session { export, size_bytes, structured: self.structured, contexts, names_link }
    }

    /// Flush and FUA are offered for read-only exports too: clients send them without asking.
    fn flags(&self, offer: &Offer) -> u16 {
        use transmission as t;
        let always = t::HAS_FLAGS | t::SEND_FLUSH | t::SEND_FUA | t::SEND_CACHE;
        let several = if offer.is_alone { 0 } else { t::CAN_MULTI_CONN };
        let writes = t::SEND_TRIM | t::SEND_WRITE_ZEROES | t::SEND_FAST_ZERO;
        let fragments = if self.structured { t::SEND_DF } else { 0 };
        always | several | fragments | if offer.read_only { t::READ_ONLY } else { writes }
    }
}

fn hang_up(consumed: usize) -> Option<Step> {
    Some(Step { consumed, next: Next::HangUp })
}

fn is_known(option: u32) -> bool {
    matches!(option, option::EXPORT_NAME..=option::LIST | option::STARTTLS..=option::SET_META_CONTEXT)
}

fn refuse(out: &mut Vec<u8>, option: u32, kind: u32, why: &str) {
    put_reply(out, option, kind, &[why.as_bytes()]);
}

fn refuse_unknown(out: &mut Vec<u8>, option: u32, name: &str) {
    // The name comes back cut: a message with a name of 4096 bytes would be longer than a string may be.
    refuse(out, option, rep::ERR_UNKNOWN, &format!("no export is named '{}'", cut(name, 256)));
}

fn put_infos(out: &mut Vec<u8>, option: u32, offer: &Offer, flags: u16, request: &InfoRequest<'_>) {
    let kind = u16::to_be_bytes;
    let (size, flags) = (offer.size_bytes.to_be_bytes(), flags.to_be_bytes());
    put_reply(out, option, rep::INFO, &[&kind(info::EXPORT), &size, &flags]);
    if request.wants_name {
        put_reply(out, option, rep::INFO, &[&kind(info::NAME), offer.name.as_bytes()]);
    }
    if request.wants_description && !offer.description.is_empty() {
        let text = offer.description.as_bytes();
        put_reply(out, option, rep::INFO, &[&kind(info::DESCRIPTION), text]);
    }
    if request.wants_block_size {
        let sizes = [offer.minimum_bytes, offer.preferred_bytes, offer.maximum_bytes];
        let [low, best, high] = sizes.map(u32::to_be_bytes);
        put_reply(out, option, rep::INFO, &[&kind(info::BLOCK_SIZE), &low, &best, &high]);
    }
}

/// For a fuzz target: runs whole handshakes with hostile bytes, in pieces, and checks the bounds.
pub fn fuzz_handshake(data: &[u8]) {
    let offer = Offer {
        name: "disk".into(),
        description: "a disk".into(),
        size_bytes: 1 << 20,
        read_only: false,
        minimum_bytes: 1,
        preferred_bytes: 4096,
        maximum_bytes: 32 << 20,
        checkpoints: vec!["monday".into()],
        kept: Some("here".into()),
        is_alone: false,
    };
    for tls in [TlsMode::Off, TlsMode::Optional, TlsMode::Required] {
        let offers: Arc<[Offer]> = Arc::new([offer.clone()]);
        let mut out = Vec::new();
        let mut negotiator = Negotiator::new(offers, tls, &mut out);
        let mut rest = data;
        loop {
            let needed = negotiator.bytes_needed(&rest[..rest.len().min(OPTION_HEADER_BYTES)]);
            let Some(step) = negotiator.step(rest, &mut out) else {
                assert!(rest.len() < needed, "enough is there and no step is made");
                break;
            };
            assert!(rest.len() >= needed || step.next == Next::HangUp);
            assert!(step.consumed > 0 && step.consumed <= rest.len());
            rest = &rest[step.consumed..];
            match step.next {
                Next::Continue => {}
                Next::StartTls => negotiator.tls_started(negotiator.offers.clone()),
                Next::Transmit(_) | Next::HangUp => break,
            }
        }
    }
}

#[cfg(test)]
mod tests;
