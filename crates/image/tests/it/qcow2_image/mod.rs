//! Makes small qcow2 images, any field of which a test can poke.
//!
//! An image of version 3 with one L1 table and one L2 table: cluster 0 is the header, 1 the refcount table, 2 its only
//! block, 3 the L1 table, 4 the L2 table; data follow. Refcounts are set when the image is finished.
#![allow(dead_code, reason = "each test program uses a part of it")]

pub const COPIED: u64 = 1 << 63;
pub const COMPRESSED: u64 = 1 << 62;

#[derive(Clone)]
pub struct Image {
    pub bytes: Vec<u8>,
    pub cluster_bits: u32,
    /// Extensions: type and data.
    pub extensions: Vec<(u32, Vec<u8>)>,
    pub backing: Option<Vec<u8>>,
    /// Clusters whose count is not 1.
    pub counts: Vec<(u64, u64)>,
}

impl Image {
    /// An empty image of `size_bytes`, all of which one L2 table must cover.
    pub fn new(cluster_bits: u32, size_bytes: u64) -> Self {
        let cluster = 1u64 << cluster_bits;
        let bytes = vec![0; 5 << cluster_bits];
        let mut image = Self { bytes, cluster_bits, extensions: Vec::new(), backing: None, counts: Vec::new() };
        image.put(0, b"QFI\xfb");
        image.put32(4, 3);
        image.put32(20, cluster_bits);
        image.put64(24, size_bytes);
        image.put32(36, 1);
        image.put64(40, 3 * cluster);
        image.put64(48, cluster);
        image.put32(56, 1);
        image.put32(96, 4);
        image.put32(100, 112);
        image.put64(cluster, 2 * cluster);
        image.put64(3 * cluster, (4 * cluster) | COPIED);
        image
    }

    /// The usual one: 64 KiB clusters, 1 MiB.
    pub fn usual() -> Self {
        Self::new(16, 1 << 20)
    }

    pub fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    pub fn put(&mut self, at: u64, value: &[u8]) {
        self.bytes[at as usize..at as usize + value.len()].copy_from_slice(value);
    }

    pub fn put32(&mut self, at: u64, value: u32) {
        self.put(at, &value.to_be_bytes());
    }

    pub fn put64(&mut self, at: u64, value: u64) {
        self.put(at, &value.to_be_bytes());
    }

    pub fn get64(&self, at: u64) -> u64 {
        u64::from_be_bytes(self.bytes[at as usize..at as usize + 8].try_into().unwrap())
    }

    /// Sets bits of the incompatible features.
    pub fn incompatible(&mut self, bits: u64) {
        self.put64(72, self.get64(72) | bits);
    }

    /// The place of the L1 entry and of an L2 entry of 8 bytes.
    pub fn l1_at(&self) -> u64 {
        3 * self.cluster()
    }

    pub fn l2_at(&self, index: u64) -> u64 {
        4 * self.cluster() + index * 8
    }

    pub fn set_l2(&mut self, index: u64, entry: u64) {
        self.put64(self.l2_at(index), entry);
    }

    /// Sets an extended entry.
    pub fn set_extended(&mut self, index: u64, entry: u64, bitmap: u64) {
        self.set_l2(index * 2, entry);
        self.set_l2(index * 2 + 1, bitmap);
    }

    /// Appends clusters with that content (the last one padded); returns where they start.
    pub fn append(&mut self, content: &[u8]) -> u64 {
        let at = self.bytes.len().next_multiple_of(self.cluster() as usize);
        self.bytes.resize(at, 0);
        self.bytes.extend(content);
        self.bytes.resize(self.bytes.len().next_multiple_of(self.cluster() as usize), 0);
        at as u64
    }

    /// A cluster of that byte as guest cluster `index`.
    pub fn data(&mut self, index: u64, byte: u8) -> u64 {
        let at = self.append(&vec![byte; self.cluster() as usize]);
        self.set_l2(index, at | COPIED);
        at
    }

    /// Two compressed streams in one cluster, which the guest sees as its clusters 2 and 3, and a preallocated zero cluster, its cluster 4. Returns where
    /// both lie in the file.
    pub fn two_streams_and_a_zero_cluster(&mut self) -> (u64, u64) {
        let stream = deflate(&[7; 65536]);
        let len = stream.len() as u64;
        let at = self.append(&[&stream[..], &stream].concat());
        self.set_l2(2, self.compressed_entry(at, len));
        self.set_l2(3, self.compressed_entry(at + len, len));
        let zero = self.append(&[0; 1]);
        self.set_l2(4, zero | 1);
        (at, zero)
    }

    /// The L2 entry of compressed data at `offset`.
    pub fn compressed_entry(&self, offset: u64, len_bytes: u64) -> u64 {
        let more_sectors = (offset % 512 + len_bytes).div_ceil(512) - 1;
        COMPRESSED | more_sectors << (62 - (self.cluster_bits - 8)) | offset
    }

    /// A compressed cluster as guest cluster `index`; its stream starts `skip` bytes into a host cluster.
    pub fn compressed(&mut self, index: u64, content: &[u8], skip: usize) -> u64 {
        let stream = deflate(content);
        let at = self.append(&[&vec![0; skip][..], &stream].concat()) + skip as u64;
        self.set_l2(index, self.compressed_entry(at, stream.len() as u64));
        at
    }

    pub fn extension(&mut self, kind: u32, data: &[u8]) {
        self.extensions.push((kind, data.to_vec()));
    }

    pub fn backing(&mut self, name: &str, format: Option<&str>) {
        self.backing = Some(name.as_bytes().to_vec());
        if let Some(format) = format {
            self.extension(0xe279_2aca, format.as_bytes());
        }
    }

    /// Writes extensions, backing name and refcounts.
    pub fn finish(mut self) -> Vec<u8> {
        let mut at = u64::from(u32::from_be_bytes(self.bytes[100..104].try_into().unwrap()));
        for (kind, data) in std::mem::take(&mut self.extensions) {
            self.put32(at, kind);
            self.put32(at + 4, data.len() as u32);
            self.put(at + 8, &data);
            at += (8 + data.len() as u64).next_multiple_of(8);
        }
        if let Some(name) = self.backing.take() {
            self.put64(8, at + 8);
            self.put32(16, name.len() as u32);
            self.put(at + 8, &name);
        }
        let clusters = self.bytes.len().div_ceil(self.cluster() as usize) as u64;
        let listed = self.counts.clone();
        for cluster in 0..clusters {
            let count = listed.iter().find(|(other, _)| *other == cluster).map_or(1, |(_, count)| *count);
            let at = 2 * self.cluster() + cluster * 2;
            self.put(at, &(count as u16).to_be_bytes());
        }
        self.bytes
    }
}

/// Raw deflate, as qcow2 has it.
pub fn deflate(content: &[u8]) -> Vec<u8> {
    miniz_oxide::deflate::compress_to_vec(content, 6)
}
