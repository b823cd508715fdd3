# k3_build_info: a small library that knows the commit. The commit is read at build time, since a checkout changes it
# without a new configure; the file is touched only when its text changes, so nothing is rebuilt for nothing.
string(TOUPPER "${CMAKE_BUILD_TYPE}" k3_type)
set(k3_build_flags ${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_${k3_type}} -ffp-contract=off)
foreach(san IN LISTS sanitizers)
  list(APPEND k3_build_flags -fsanitize=${san})
endforeach()
list(JOIN k3_build_flags " " k3_build_flags)
string(REGEX REPLACE " +" " " k3_build_flags "${k3_build_flags}")
if(K3_HAS_CUDA)
  set(k3_cuda_bool true)
  set(k3_cuda_note "nvcc ${CMAKE_CUDA_COMPILER_VERSION}, sm_${K3_CUDA_ARCHS}")
else()
  set(k3_cuda_bool false)
  set(k3_cuda_note "${K3_CUDA_WHY_NOT}")
endif()
set(k3_info_head ${CMAKE_BINARY_DIR}/generated/build_info.head)
file(CONFIGURE OUTPUT ${k3_info_head} CONTENT
"#define K3_BUILD_VERSION \"${PROJECT_VERSION}\"
#define K3_BUILD_TYPE \"${CMAKE_BUILD_TYPE}\"
#define K3_BUILD_FLAGS \"${k3_build_flags}\"
#define K3_BUILD_COMPILER \"${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}\"
#define K3_BUILD_CUDA ${k3_cuda_bool}
#define K3_BUILD_CUDA_NOTE \"${k3_cuda_note}\"
")
add_custom_target(
  k3_read_commit
  COMMAND ${CMAKE_COMMAND} -DSOURCE=${CMAKE_SOURCE_DIR} -DHEAD=${k3_info_head}
          -DOUT=${CMAKE_BINARY_DIR}/generated/build_info.inc -P ${CMAKE_CURRENT_LIST_DIR}/read_commit.cmake
  BYPRODUCTS ${CMAKE_BINARY_DIR}/generated/build_info.inc
  COMMENT "Reading the commit"
  VERBATIM)
add_library(k3_build_info STATIC build_info.cpp)
target_link_libraries(k3_build_info PUBLIC k3_flags)
target_include_directories(k3_build_info PRIVATE ${CMAKE_BINARY_DIR})
add_dependencies(k3_build_info k3_read_commit)
