//! [`Segment`]: one contiguous run of bytes with its owner. [`Segments`]: a scatter list of them.
//!
//! Why there is no lock and no borrow: the other side is a device or a guest, which knows of neither. Two threads that
//! copy at the same bytes at the same moment get some mixture of old and new, as with memory that a device writes;
//! nothing here trusts those bytes, and no reference to them ever exists that the mixture could break.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use smallvec::SmallVec;

use crate::mapping::Mapping;
use crate::pool::ChunkRef;

/// The alignment in bytes of all memory allocated by this crate: a page, enough for any direct I/O.
pub const PAGE_BYTES: usize = 4096;

/// One contiguous run of bytes, kept alive by its owner. Cloning shares the bytes.
#[derive(Clone)]
pub struct Segment {
    ptr: NonNull<u8>,
    len: usize,
    owner: Owner,
}

/// A number at any address.
#[repr(C, packed)]
struct Unaligned(u64);

#[derive(Clone)]
enum Owner {
    Pool(#[expect(dead_code, reason = "held for its drop")] ChunkRef),
    Heap(#[expect(dead_code, reason = "held for its drop")] Arc<Heap>),
    Mapped(Arc<Mapping>),
    Other(#[expect(dead_code, reason = "held for its drop")] Arc<dyn Send + Sync>),
}

// SAFETY: the memory is kept alive by the owner, which is itself Send + Sync, and is reached only by raw copies.
unsafe impl Send for Segment {}
// SAFETY: as for Send; a shared Segment offers only copies in and out, as shared guest memory does.
unsafe impl Sync for Segment {}

impl Segment {
    /// Allocates `len` zeroed bytes, page-aligned, from the heap (not from a pool).
    pub fn zeroed(len: usize) -> Self {
        Self::try_zeroed(len).unwrap_or_else(|| handle_alloc_error(Heap::layout(len)))
    }

    /// As [`Segment::zeroed`]; `None` when the system has no memory for it.
    pub fn try_zeroed(len: usize) -> Option<Self> {
        let heap = Arc::new(Heap::try_zeroed(len)?);
        Some(Self { ptr: heap.ptr, len, owner: Owner::Heap(heap) })
    }

    /// A segment over a chunk of a pool.
    pub(crate) fn from_chunk(ptr: NonNull<u8>, len: usize, chunk: ChunkRef) -> Self {
        Self { ptr, len, owner: Owner::Pool(chunk) }
    }

    /// A segment over a whole mapping.
    pub(crate) fn from_mapping(ptr: NonNull<u8>, len: usize, mapping: Arc<Mapping>) -> Self {
        Self { ptr, len, owner: Owner::Mapped(mapping) }
    }

    /// A segment over memory that `owner` keeps alive, such as memory that a device has mapped.
    ///
    /// # Safety
    /// `ptr` is the start of `len` bytes that may be read and written (or only read, when whoever uses the segment only
    /// reads) for as long as `owner` lives.
    pub unsafe fn from_owner(ptr: NonNull<u8>, len: usize, owner: Arc<dyn Send + Sync>) -> Self {
        Self { ptr, len, owner: Owner::Other(owner) }
    }

    /// True when the file of a shared mapping was made shorter and an access has found that: the mapping was replaced
    /// by zeroed memory, and nothing that is read from it can be trusted.
    pub fn is_lost(&self) -> bool {
        matches!(&self.owner, Owner::Mapped(mapping) if mapping.is_lost())
    }

    /// True when `next` begins where this segment ends, in the same mapping.
    fn is_followed_by(&self, next: &Segment) -> bool {
        let (Owner::Mapped(mine), Owner::Mapped(its)) = (&self.owner, &next.owner) else { return false };
        Arc::ptr_eq(mine, its) && self.ptr.as_ptr().wrapping_add(self.len) == next.ptr.as_ptr()
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when the segment has no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the first byte, for a system call. Valid while this segment or a clone of it lives.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// The part `range` of this segment, sharing the bytes.
    ///
    /// # Panics
    /// When `range` is not inside the segment.
    #[inline]
    pub fn slice(&self, range: Range<usize>) -> Self {
        self.clone().into_slice(range)
    }

    /// The part `range` of this segment.
    ///
    /// # Panics
    /// When `range` is not inside the segment.
    #[inline]
    pub fn into_slice(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "slice {range:?} of a segment of {}", self.len);
        // SAFETY: the offset is within the segment, as just checked.
        let ptr = unsafe { self.ptr.add(range.start) };
        Self { ptr, len: range.end - range.start, owner: self.owner }
    }

    /// Copies `src` into the segment at `at`.
    ///
    /// # Panics
    /// When it does not fit.
    pub fn copy_from_slice(&self, at: usize, src: &[u8]) {
        assert!(at <= self.len && src.len() <= self.len - at, "copy of {} to {at} of {}", src.len(), self.len);
        // SAFETY: the destination is in bounds; `src` is a live slice; a `Segment` never aliases a `&[u8]`.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), self.ptr.as_ptr().add(at), src.len()) }
    }

    /// Copies bytes at `at` out of the segment into `dst`, filling it.
    ///
    /// # Panics
    /// When the segment ends before `dst` is full.
    pub fn copy_to_slice(&self, at: usize, dst: &mut [u8]) {
        assert!(at <= self.len && dst.len() <= self.len - at, "copy of {} from {at} of {}", dst.len(), self.len);
        // SAFETY: the source is in bounds; `dst` is exclusively ours; a `Segment` never aliases a `&mut [u8]`.
        unsafe { std::ptr::copy_nonoverlapping(self.ptr.as_ptr().add(at), dst.as_mut_ptr(), dst.len()) }
    }

    /// The `N` bytes at `at`, each read exactly once: what is then checked cannot change before it is used.
    ///
    /// # Panics
    /// When they are not inside the segment.
    #[inline]
    pub fn read_array<const N: usize>(&self, at: usize) -> [u8; N] {
        assert!(at <= self.len && N <= self.len - at, "read of {N} at {at} of {}", self.len);
        let mut bytes = [0; N];
        // Word by word: the compiler would read an array of bytes one by one.
        let (words, rest) = bytes.as_chunks_mut::<8>();
        let tail = words.len() * 8;
        for (number, word) in words.iter_mut().enumerate() {
            // SAFETY: in bounds; the type has an alignment of 1, and no invalid values.
            let read = unsafe { self.ptr.as_ptr().add(at + 8 * number).cast::<Unaligned>().read_volatile() };
            *word = read.0.to_ne_bytes();
        }
        for (number, byte) in rest.iter_mut().enumerate() {
            // SAFETY: in bounds.
            *byte = unsafe { self.ptr.as_ptr().add(at + tail + number).read_volatile() };
        }
        bytes
    }

    /// Copies `src`'s bytes here; both have the same length and may overlap.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn copy_from(&self, src: &Segment) {
        assert_eq!(self.len, src.len, "copy between segments of different lengths");
        self.copy_part(0, src, 0..src.len);
    }

    /// Copies the bytes `part` of `src` here, to `at`. The two may overlap.
    ///
    /// # Panics
    /// When `part` is not inside `src`, or does not fit here.
    #[inline]
    pub fn copy_part(&self, at: usize, src: &Segment, part: Range<usize>) {
        assert!(part.start <= part.end && part.end <= src.len, "copy of {part:?} of a segment of {}", src.len);
        assert!(at <= self.len && part.len() <= self.len - at, "copy of {part:?} to {at} of {}", self.len);
        // SAFETY: both runs are in bounds and alive, as just checked; `copy` allows overlap.
        unsafe { std::ptr::copy(src.ptr.as_ptr().add(part.start), self.ptr.as_ptr().add(at), part.len()) }
    }

    /// Sets every byte to `byte`.
    pub fn fill(&self, byte: u8) {
        // SAFETY: the run is in bounds and alive.
        unsafe { std::ptr::write_bytes(self.ptr.as_ptr(), byte, self.len) }
    }

    /// True when every byte is zero.
    pub fn is_zero(&self) -> bool {
        let mut chunk = [0u8; 512];
        (0..self.len).step_by(512).all(|at| {
            let part = &mut chunk[..512.min(self.len - at)];
            self.copy_to_slice(at, part);
            part.iter().fold(0, |acc, byte| acc | byte) == 0
        })
    }

    /// A copy of the bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.copy_to_slice(0, &mut bytes);
        bytes
    }
}

/// Atomic access to a number in memory that another process shares, in the byte order of this machine.
macro_rules! atomics {
    ($($number:ty, $atomic:ty, $load:ident, $store:ident;)*) => {
        impl Segment {
            $(
                /// Reads the number at byte `at`.
                ///
                /// # Panics
                /// When it is not inside the segment, or its address is not a multiple of its size.
                #[inline]
                pub fn $load(&self, at: usize, order: Ordering) -> $number {
                    let ptr = self.number(at, size_of::<$number>()).cast();
                    // SAFETY: in bounds, aligned and alive; everyone who shares it uses it atomically or takes what
                    // comes.
                    unsafe { <$atomic>::from_ptr(ptr) }.load(order)
                }

                /// Writes the number at byte `at`.
                ///
                /// # Panics
                /// When it is not inside the segment, or its address is not a multiple of its size.
                #[inline]
                pub fn $store(&self, at: usize, value: $number, order: Ordering) {
                    let ptr = self.number(at, size_of::<$number>()).cast();
                    // SAFETY: as for reading.
                    unsafe { <$atomic>::from_ptr(ptr) }.store(value, order);
                }
            )*
        }
    };
}

atomics! {
    u8, AtomicU8, load_u8, store_u8;
    u16, AtomicU16, load_u16, store_u16;
    u32, AtomicU32, load_u32, store_u32;
    u64, AtomicU64, load_u64, store_u64;
}

impl Segment {
    /// The address of a number of `size` bytes at `at`.
    #[inline]
    fn number(&self, at: usize, size: usize) -> *mut u8 {
        assert!(at <= self.len && size <= self.len - at, "number of {size} at {at} of {}", self.len);
        let ptr = self.ptr.as_ptr().wrapping_add(at);
        assert!((ptr as usize).is_multiple_of(size), "number of {size} at an odd address");
        ptr
    }

    /// Sets the bits of `mask` in the byte at `at`, whatever others do to it at the same moment.
    ///
    /// # Panics
    /// When it is not inside the segment.
    pub fn or_u8(&self, at: usize, mask: u8) {
        // SAFETY: as for reading.
        unsafe { AtomicU8::from_ptr(self.number(at, 1)) }.fetch_or(mask, Ordering::AcqRel);
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Segment({:p}, {} bytes)", self.ptr, self.len)
    }
}

/// A page-aligned heap allocation.
struct Heap {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain memory, freed once, by whichever thread drops the last share.
unsafe impl Send for Heap {}
// SAFETY: it has no interior access of its own.
unsafe impl Sync for Heap {}

impl Heap {
    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len.max(1), PAGE_BYTES).expect("allocation size overflows")
    }

    fn try_zeroed(len: usize) -> Option<Self> {
        let layout = Self::layout(len);
        // SAFETY: the layout has a size that is not zero.
        let ptr = unsafe { alloc_zeroed(layout) };
        Some(Self { ptr: NonNull::new(ptr)?, layout })
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: allocated in `try_zeroed` with this very layout, freed only here.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) }
    }
}

/// A scatter list: the bytes of one request, in order. Cloning shares the bytes.
#[derive(Clone, Debug, Default)]
pub struct Segments {
    list: SmallVec<[Segment; 2]>,
    len: usize,
}

impl Segments {
    /// An empty list.
    pub const fn new() -> Self {
        Self { list: SmallVec::new_const(), len: 0 }
    }

    /// One zeroed, page-aligned heap segment of `len` bytes.
    pub fn zeroed(len: usize) -> Self {
        Segment::zeroed(len).into()
    }

    /// A page-aligned heap copy of `bytes`.
    pub fn copied(bytes: &[u8]) -> Self {
        let segment = Segment::zeroed(bytes.len());
        segment.copy_from_slice(0, bytes);
        segment.into()
    }

    /// Appends a segment; empty ones are dropped.
    #[inline]
    pub fn push(&mut self, segment: Segment) {
        if !segment.is_empty() {
            self.len += segment.len();
            self.list.push(segment);
        }
    }

    /// Appends a segment. When it goes on where the last one ends in the same memory, the two become one.
    #[inline]
    pub fn push_joined(&mut self, segment: Segment) {
        match self.list.last_mut() {
            Some(last) if last.is_followed_by(&segment) => {
                last.len += segment.len;
                self.len += segment.len;
            }
            _ => self.push(segment),
        }
    }

    /// Drops all segments; the list keeps its room for as many.
    #[inline]
    pub fn clear(&mut self) {
        self.list.clear();
        self.len = 0;
    }

    /// Total length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when there are no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The segments, in order.
    #[inline]
    pub fn iter(&self) -> std::slice::Iter<'_, Segment> {
        self.list.iter()
    }

    /// The segments as a slice.
    #[inline]
    pub fn as_slice(&self) -> &[Segment] {
        &self.list
    }

    /// True when every segment's address and length are multiples of `align` bytes (a power of two).
    #[inline]
    pub fn is_aligned(&self, align: usize) -> bool {
        self.list.iter().all(|s| (s.as_ptr() as usize | s.len()) & (align - 1) == 0)
    }

    /// The part `range` of the whole run of bytes, sharing them.
    ///
    /// # Panics
    /// When `range` is not inside the list.
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "slice {range:?} of segments of {}", self.len);
        let mut out = Self::new();
        self.visit(range, |segment, part, _| out.push(segment.slice(part)));
        out
    }

    /// Copies `src` in at `at`.
    ///
    /// # Panics
    /// When it does not fit.
    pub fn copy_from_slice(&self, at: usize, src: &[u8]) {
        self.visit(at..at.wrapping_add(src.len()), |segment, part, done| {
            segment.copy_from_slice(part.start, &src[done..done + part.len()]);
        });
    }

    /// Copies bytes at `at` out, filling `dst`.
    ///
    /// # Panics
    /// When the list ends before `dst` is full.
    pub fn copy_to_slice(&self, at: usize, dst: &mut [u8]) {
        self.visit(at..at.wrapping_add(dst.len()), |segment, part, done| {
            let len = part.len();
            segment.copy_to_slice(part.start, &mut dst[done..done + len]);
        });
    }

    /// Copies all of `src` here; the total lengths must be equal and the two must not overlap.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn copy_from(&self, src: &Segments) {
        assert_eq!(self.len, src.len, "copy between lists of different lengths");
        let mut at = 0;
        for from in &src.list {
            self.visit(at..at + from.len(), |segment, part, done| {
                let len = part.len();
                segment.slice(part).copy_from(&from.slice(done..done + len));
            });
            at += from.len();
        }
    }

    /// Sets every byte to `byte`.
    pub fn fill(&self, byte: u8) {
        self.list.iter().for_each(|segment| segment.fill(byte));
    }

    /// True when every byte is zero.
    pub fn is_zero(&self) -> bool {
        self.list.iter().all(Segment::is_zero)
    }

    /// A copy of all bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.copy_to_slice(0, &mut bytes);
        bytes
    }

    /// Calls `f(segment, part of that segment, bytes of the range before it)` for each piece of `range`.
    fn visit(&self, range: Range<usize>, mut f: impl FnMut(&Segment, Range<usize>, usize)) {
        assert!(range.start <= range.end && range.end <= self.len, "range {range:?} of segments of {}", self.len);
        let mut base = 0;
        for segment in &self.list {
            let start = range.start.max(base);
            let end = range.end.min(base + segment.len());
            if start < end {
                f(segment, start - base..end - base, start - range.start);
            }
            base += segment.len();
            if base >= range.end {
                break;
            }
        }
    }
}

impl From<Segment> for Segments {
    fn from(segment: Segment) -> Self {
        let mut list = Self::new();
        list.push(segment);
        list
    }
}

impl FromIterator<Segment> for Segments {
    fn from_iter<I: IntoIterator<Item = Segment>>(iter: I) -> Self {
        let mut list = Self::new();
        iter.into_iter().for_each(|segment| list.push(segment));
        list
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(lens: &[usize]) -> Segments {
        lens.iter().map(|&len| Segment::zeroed(len)).collect()
    }

    #[test]
    fn slices_share_their_bytes() {
        let whole = list(&[3, 5, 4]);
        whole.slice(2..9).copy_from_slice(0, &[1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(whole.to_vec(), [0, 0, 1, 2, 3, 4, 5, 6, 7, 0, 0, 0]);
        assert!(whole.slice(9..12).is_zero() && !whole.slice(8..12).is_zero());
    }

    #[test]
    fn lists_of_different_shapes_copy() {
        let (a, b) = (list(&[3, 5, 4]), list(&[6, 6]));
        a.copy_from_slice(0, b"abcdefghijkl");
        b.copy_from(&a);
        assert_eq!(b.to_vec(), b"abcdefghijkl");
    }

    #[test]
    fn heap_segments_are_page_aligned() {
        assert!(list(&[4096, 8192]).is_aligned(4096));
        assert!(!list(&[4096, 512]).is_aligned(4096));
    }

    #[test]
    #[should_panic(expected = "of segments of 8")]
    fn a_copy_at_a_place_that_overflows_panics() {
        list(&[4, 4]).copy_to_slice(usize::MAX, &mut [0; 2]);
    }

    #[test]
    fn numbers_are_read_and_written_in_place() {
        let segment = Segment::zeroed(16);
        segment.store_u32(4, 0x0102_0304, Ordering::Relaxed);
        segment.or_u8(0, 0x81);
        assert_eq!(segment.load_u64(0, Ordering::Relaxed), u64::from_ne_bytes(segment.read_array(0)));
        assert_eq!(segment.load_u8(0, Ordering::Relaxed), 0x81);
    }

    #[test]
    #[should_panic(expected = "number of 4 at 14 of 16")]
    fn a_number_past_the_end_panics() {
        Segment::zeroed(16).load_u32(14, Ordering::Relaxed);
    }

    #[test]
    #[should_panic(expected = "odd address")]
    fn a_number_at_an_odd_address_panics() {
        Segment::zeroed(16).store_u16(3, 1, Ordering::Relaxed);
    }

    #[test]
    #[should_panic(expected = "copy of 4 to 1 of 4")]
    fn a_copy_past_the_end_panics() {
        Segment::zeroed(4).copy_from_slice(1, &[0; 4]);
    }
}
