//! The messages that a well-behaved front end sends, one method each.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use spile_core::{Error, ErrorKind, Result, ResultExt};

use super::config::BlkConfig;
use super::proto::{
    FLAG_NEED_REPLY, FLAG_REPLY, InflightPayload, RegionPayload, Request, VringAddresses, config_payload,
    protocol_feature, u32_at, vring_state,
};
use super::raw::{Message, Socket, broken};

/// A connection to a server, and the protocol features that were agreed on.
#[derive(Debug)]
pub struct Connection {
    socket: Socket,
    protocol_features: u64,
}

impl Connection {
    /// Connects to the server that listens at `path`, and says nothing yet.
    ///
    /// # Errors
    /// With the path.
    pub fn connect(path: &Path) -> Result<Self> {
        Ok(Self::new(Socket::connect(path)?))
    }

    /// Takes a connected socket.
    pub fn new(socket: Socket) -> Self {
        Self { socket, protocol_features: 0 }
    }

    /// The socket, for messages of any kind.
    pub fn socket(&self) -> &Socket {
        &self.socket
    }

    /// The protocol features that were agreed on.
    pub fn protocol_features(&self) -> u64 {
        self.protocol_features
    }

    fn has(&self, protocol_feature: u64) -> bool {
        self.protocol_features & protocol_feature != 0
    }

    /// Sends a request that has no reply of its own; with REPLY_ACK it waits for the server's consent.
    ///
    /// # Errors
    /// `Protocol` when the server refuses; `Io` when the connection is lost.
    pub fn tell(&self, request: Request, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        if !self.has(protocol_feature::REPLY_ACK) {
            return self.socket.send(request, 0, payload, fds);
        }
        self.socket.send(request, FLAG_NEED_REPLY, payload, fds)?;
        match self.reply(request)?.u64()? {
            0 => Ok(()),
            code => Err(broken(format!("the server refused {request:?} with code {code}"))),
        }
    }

    /// Sends a request that has a reply, and returns that.
    ///
    /// # Errors
    /// `Protocol` when the reply is of another kind; `Io` when the connection is lost.
    pub fn ask(&self, request: Request, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<Message> {
        self.socket.send(request, 0, payload, fds)?;
        self.reply(request)
    }

    fn reply(&self, request: Request) -> Result<Message> {
        let reply = self.socket.receive()?;
        let right = reply.header.request == request as u32 && reply.header.flags & 7 == FLAG_REPLY | 1;
        if right { Ok(reply) } else { Err(broken(format!("to {request:?} came {:?}", reply.header))) }
    }

    /// SET_OWNER.
    ///
    /// # Errors
    /// As [`Connection::tell`], as for all methods below that return nothing.
    pub fn set_owner(&self) -> Result<()> {
        self.tell(Request::SetOwner, &[], &[])
    }

    /// GET_FEATURES.
    ///
    /// # Errors
    /// As [`Connection::ask`], as for all methods below that return something.
    pub fn features(&self) -> Result<u64> {
        self.ask(Request::GetFeatures, &[], &[])?.u64()
    }

    /// SET_FEATURES.
    ///
    /// # Errors
    /// See [`Connection::set_owner`].
    pub fn set_features(&self, features: u64) -> Result<()> {
        self.tell(Request::SetFeatures, &features.to_ne_bytes(), &[])
    }

    /// GET_PROTOCOL_FEATURES.
    ///
    /// # Errors
    /// See [`Connection::features`].
    pub fn offered_protocol_features(&self) -> Result<u64> {
        self.ask(Request::GetProtocolFeatures, &[], &[])?.u64()
    }

    /// SET_PROTOCOL_FEATURES; they hold from the next message on.
    ///
    /// # Errors
    /// `Io` when the connection is lost.
    pub fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        self.socket.send(Request::SetProtocolFeatures, 0, &features.to_ne_bytes(), &[])?;
        self.protocol_features = features;
        Ok(())
    }

    /// GET_QUEUE_NUM; 1 without the MQ protocol feature.
    ///
    /// # Errors
    /// See [`Connection::features`].
    pub fn max_queues(&self) -> Result<u64> {
        match self.has(protocol_feature::MQ) {
            true => self.ask(Request::GetQueueNum, &[], &[])?.u64(),
            false => Ok(1),
        }
    }

    /// GET_MAX_MEM_SLOTS.
    ///
    /// # Errors
    /// See [`Connection::features`].
    pub fn max_memory_slots(&self) -> Result<u64> {
        self.ask(Request::GetMaxMemSlots, &[], &[])?.u64()
    }

    /// GET_CONFIG of the whole block configuration.
    ///
    /// # Errors
    /// `Unsupported` when the server has no CONFIG protocol feature; else see [`Connection::features`].
    pub fn config(&self) -> Result<BlkConfig> {
        if !self.has(protocol_feature::CONFIG) {
            return Err(Error::new(ErrorKind::Unsupported, "the server does not tell its configuration"));
        }
        let asked = config_payload(0, 0, &[0; BlkConfig::BYTES]);
        let reply = self.ask(Request::GetConfig, &asked, &[])?;
        let bytes = reply.payload.get(12..).and_then(|rest| rest.first_chunk());
        bytes.map(BlkConfig::parse).ok_or_else(|| broken("the server refused to tell its configuration"))
    }

    /// SET_CONFIG of `bytes` at `offset`.
    ///
    /// # Errors
    /// See [`Connection::set_owner`].
    pub fn set_config(&self, offset: u32, bytes: &[u8]) -> Result<()> {
        self.tell(Request::SetConfig, &config_payload(offset, 0, bytes), &[])
    }

    /// SET_MEM_TABLE; one descriptor a region.
    ///
    /// # Errors
    /// See [`Connection::set_owner`].
    pub fn set_memory_table(&self, regions: &[RegionPayload], fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.tell(Request::SetMemTable, &RegionPayload::table(regions), fds)
    }

    /// ADD_MEM_REG.
    ///
    /// # Errors
    /// See [`Connection::set_owner`].
    pub fn add_memory_region(&self, region: RegionPayload, fd: BorrowedFd<'_>) -> Result<()> {
        self.tell(Request::AddMemReg, &region.single(), &[fd])
    }

    /// REM_MEM_REG.
    ///
    /// # Errors
    /// See [`Connection::set_owner`].
    pub fn remove_memory_region(&self, region: RegionPayload) -> Result<()> {
        self.tell(Request::RemMemReg, &region.single(), &[])
    }

    /// SET_VRING_NUM.
    ///
    /// # Errors
    /// See [`Connection::set_owner`].
    pub fn set_vring_size(&self, index: u32, size: u32) -> Result<()> {
        self.tell(Request::SetVringNum, &vring_state(index, size), &[])
    }

    /// SET_VRING_BASE.
    ///
    /// # Errors
    /// See [`Connection::set_owner`].
    pub fn set_vring_base(&self, index: u32, base: u16) -> Result<()> {
        self.tell(Request::SetVringBase, &vring_state(index, u32::from(base)), &[])
    }

    /// GET_VRING_BASE, which stops the ring.
    ///
    /// # Errors
    /// See [`Connection::features`].
    pub fn stop_vring(&self, index: u32) -> Result<u16> {
        let reply = self.ask(Request::GetVringBase, &vring_state(index, 0), &[])?;
        match reply.payload.len() == 8 && u32_at(&reply.payload, 0) == index {
            true => Ok(u32_at(&reply.payload, 4) as u16),
            false => Err(broken("the reply to GetVringBase is of another ring")),
        }
    }

    /// SET_VRING_ADDR.
    ///
    /// # Errors
    /// See [`Connection::set_owner`].
    pub fn set_vring_addresses(&self, addresses: VringAddresses) -> Result<()> {
        self.tell(Request::SetVringAddr, &addresses.to_bytes(), &[])
    }

    /// SET_VRING_KICK, SET_VRING_CALL or SET_VRING_ERR.
    ///
    /// # Errors
    /// See [`Connection::set_owner`].
    pub fn set_vring_fd(&self, request: Request, index: u8, fd: BorrowedFd<'_>) -> Result<()> {
        self.tell(request, &u64::from(index).to_ne_bytes(), &[fd])
    }

    /// SET_VRING_ENABLE.
    ///
    /// # Errors
    /// See [`Connection::set_owner`].
    pub fn enable_vring(&self, index: u32, enable: bool) -> Result<()> {
        self.tell(Request::SetVringEnable, &vring_state(index, u32::from(enable)), &[])
    }

    /// SET_BACKEND_REQ_FD.
    ///
    /// # Errors
    /// See [`Connection::set_owner`].
    pub fn set_backend_channel(&self, fd: BorrowedFd<'_>) -> Result<()> {
        self.tell(Request::SetBackendReqFd, &[], &[fd])
    }

    /// SET_LOG_BASE, which always has a reply with LOG_SHMFD.
    ///
    /// # Errors
    /// See [`Connection::features`].
    pub fn set_log(&self, len_bytes: u64, file_offset: u64, fd: BorrowedFd<'_>) -> Result<()> {
        let payload = [len_bytes, file_offset].map(u64::to_ne_bytes).concat();
        self.ask(Request::SetLogBase, &payload, &[fd]).map(drop)
    }

    /// GET_INFLIGHT_FD.
    ///
    /// # Errors
    /// See [`Connection::features`].
    pub fn inflight(&self, queues: u16, queue_size: u16) -> Result<(InflightPayload, OwnedFd)> {
        let asked = InflightPayload { queues, queue_size, ..InflightPayload::default() };
        let mut reply = self.ask(Request::GetInflightFd, &asked.to_bytes(), &[])?;
        match (InflightPayload::parse(&reply.payload), reply.fds.pop()) {
            (Some(inflight), Some(fd)) if inflight.len_bytes > 0 => Ok((inflight, fd)),
            _ => Err(broken("the server gave no region for requests in flight")),
        }
    }

    /// SET_INFLIGHT_FD.
    ///
    /// # Errors
    /// See [`Connection::set_owner`].
    pub fn set_inflight(&self, inflight: InflightPayload, fd: BorrowedFd<'_>) -> Result<()> {
        self.tell(Request::SetInflightFd, &inflight.to_bytes(), &[fd])
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Connects, and tells the path of the server in errors.
pub(crate) fn connect(path: &Path) -> Result<Connection> {
    Connection::connect(path).at_path(path)
}
